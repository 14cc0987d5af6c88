// The server's JSON API.

export class ApiError extends Error {
  constructor(status, message, wait) {
    super(message);
    this.status = status;
    this.wait = wait;
  }
}

const pause = (seconds) => new Promise((done) => setTimeout(done, 1000 * seconds));

export async function call(method, path, body, query = {}) {
  const address = Object.keys(query).length ? `${path}?${new URLSearchParams(query)}` : path;
  const options = { method, headers: {} };
  if (body instanceof FormData || body instanceof Blob) options.body = body;
  else if (body !== undefined && body !== null) {
    options.body = JSON.stringify(body);
    options.headers["Content-Type"] = "application/json";
  }
  let answer;
  try {
    answer = await fetch(address, options);
  } catch {
    throw new ApiError(0, "The server does not answer. Is clipcil still running?", 0);
  }
  const value = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new ApiError(answer.status, value.error || `the server said ${answer.status}`, Number(answer.headers.get("Retry-After") || 0));
  return value;
}

/** As `call`, trying again while the server says that it is busy. */
export async function callPatiently(method, path, body, query) {
  for (let tries = 0; ; tries += 1) {
    try {
      return await call(method, path, body, query);
    } catch (error) {
      if (error.status !== 503 || tries >= 20) throw error;
      await pause(error.wait || 1);
    }
  }
}

/** Fetch a file and hand it to the browser's downloads. */
export async function download(path, query = {}) {
  const answer = await fetch(`${path}?${new URLSearchParams(query)}`);
  if (!answer.ok) throw new ApiError(answer.status, (await answer.json()).error, 0);
  const named = /filename="([^"]+)"/.exec(answer.headers.get("Content-Disposition") || "");
  const link = document.createElement("a");
  link.href = URL.createObjectURL(await answer.blob());
  link.download = named ? named[1] : "model.zip";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}
