// Shows the OpenAPI document of this server.

import { call } from "./api.js";
import { byId, h } from "./dom.js";

/** A schema as an example reads: names, and what stands for them. */
function sketch(schema) {
  if (schema.$ref) return sketch(described.components.schemas[schema.$ref.split("/").pop()]);
  if (schema.anyOf) {
    const kinds = schema.anyOf.map(sketch);
    return kinds.every((kind) => typeof kind === "string") ? kinds.join(" or ") : kinds[0];
  }
  if (schema.type === "object") return schema.additionalProperties ? { "…": sketch(schema.additionalProperties) } : Object.fromEntries(Object.entries(schema.properties ?? {}).map(([name, inner]) => [name, sketch(inner)]));
  if (schema.type === "array") return [sketch(schema.items)];
  const kind = [schema.type].flat().join(" or ");
  return schema.format === "binary" || schema.contentMediaType ? "file" : schema.enum ? schema.enum.join(" | ") : kind.replace("string", "text");
}

const block = (title, content) => Object.entries(content).map(([kind, { schema, itemSchema }]) => [h("h3", {}, `${title} (${kind})`), h("pre", { tabindex: "0" }, JSON.stringify(sketch(schema ?? itemSchema), null, 2))]).flat();

const described = await call("GET", "/api/openapi.json");
byId("about").textContent = described.info.description;
for (const [path, methods] of Object.entries(described.paths)) {
  for (const [method, operation] of Object.entries(methods)) {
    const query = (operation.parameters ?? []).map((each) => `${each.required ? "" : "["}${each.name}=${sketch(each.schema)}${each.required ? "" : "]"}`);
    const [status, answer] = Object.entries(operation.responses)[0];
    byId("operations").append(h("section", { class: "card" }, h("h2", {}, h("span", { class: "method" }, method.toUpperCase()), path + (query.length ? `?${query.join("&")}` : "")),
      h("p", {}, operation.description), operation.requestBody ? block("Body", operation.requestBody.content) : null, block(`Answer ${status}`, answer.content)));
  }
}
document.documentElement.dataset.ready = "";
