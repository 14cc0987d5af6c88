"""The OpenAPI document: addresses and sentences from the routes, bodies and answers from the table below."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from starlette.routing import Route

import clipcil

Schema = dict[str, Any]


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties}


def _list(of: Schema) -> Schema:
    return {"type": "array", "items": of}


TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
SWITCH: Schema = {"type": "boolean"}
SHARE: Schema = {"type": "number", "minimum": 0, "maximum": 1}
MAYBE_TEXT: Schema = {"type": ["string", "null"]}
MAYBE_SHARE: Schema = {"type": ["number", "null"], "minimum": 0, "maximum": 1}
FILE: Schema = {"type": "string", "format": "binary"}
COUNTS: Schema = {"type": "object", "additionalProperties": COUNT}
CONFUSED = _object(true=TEXT, guess=TEXT, pictures=COUNT)

PICTURE = _object(id=MAYBE_TEXT, title=TEXT, broken=MAYBE_TEXT)
RESULT = _object(
    new=COUNTS,
    again=COUNTS,
    unreadable=_list(TEXT),
    repeated=COUNT,
    held_out=COUNT,
    left_one_out=SWITCH,
    accuracy=MAYBE_SHARE,
    interval=_list(SHARE),
    confused=_list(CONFUSED),
    warnings=_list(TEXT),
)
LESSON = _object(
    id=TEXT,
    state={"type": "string", "enum": ["running", "done", "cancelled", "failed"]},
    stage=TEXT,
    done=COUNT,
    total=COUNT,
    seconds_left={"type": ["number", "null"]},
    classes=COUNTS,
    error=MAYBE_TEXT,
    result={"anyOf": [RESULT, {"type": "null"}]},
)
PREDICTION = _object(
    name=MAYBE_TEXT, unknown=SWITCH, classes=_list(_object(name=TEXT, probability=SHARE)), error=MAYBE_TEXT
)
MODEL = _object(
    name=TEXT,
    folder=TEXT,
    exists=SWITCH,
    method=MAYBE_TEXT,
    backbone=TEXT,
    accuracy=MAYBE_SHARE,
    held_out=COUNT,
    threshold=MAYBE_SHARE,
    revision=COUNT,
    previous={"anyOf": [_object(lessons=COUNT, classes=COUNT), {"type": "null"}]},
    keep_small_pictures=SWITCH,
    limits=_object(picture_bytes=COUNT, request_bytes=COUNT, request_pictures=COUNT),
    classes=_list(
        _object(
            name=TEXT,
            learnt=TEXT,
            newest=TEXT,
            pictures=COUNT,
            accuracy=MAYBE_SHARE,
            held_out=COUNT,
            small_pictures=COUNT,
        )
    ),
    lessons=_list(
        _object(
            when=TEXT,
            new=COUNT,
            again=COUNT,
            pictures=COUNT,
            classes=COUNT,
            held_out=COUNT,
            right=COUNT,
            accuracy=MAYBE_SHARE,
        )
    ),
)
FORM = {
    "multipart/form-data": {"schema": _object(name=TEXT, pictures=_list(FILE)) | {"required": ["name", "pictures"]}}
}
PICTURES = {"multipart/form-data": {"schema": _object(pictures=_list(FILE))}, "image/*": {"schema": FILE}}

NAME = ("name", TEXT, True)
BODIES: dict[str, Schema] = {
    "predict": PICTURES,
    "add_waiting": FORM,
    "rename_class": {"application/json": {"schema": _object(name=TEXT)}},
    "settings": {"application/json": {"schema": _object(keep_small_pictures=SWITCH)}},
    "upload": {"application/zip": {"schema": FILE}},
}
QUERIES: dict[str, list[tuple[str, Schema, bool]]] = {
    "predict": [("top", COUNT | {"default": 5}, False)],
    "remove_waiting": [("id", TEXT, False), ("name", TEXT, False)],
    "thumbnail": [("id", TEXT, True)],
    "rename_class": [NAME],
    "forget_class": [NAME],
    "small_picture": [NAME, ("index", COUNT, False)],
    "export": [("format", {"type": "string", "enum": ["pt2", "onnx"], "default": "pt2"}, False)],
}
ANSWERS: dict[str, tuple[int, str, Schema]] = {
    "health": (200, "application/json", _object(status=TEXT, version=TEXT, classes=COUNT, learning=SWITCH)),
    "model": (200, "application/json", MODEL),
    "predict": (200, "application/json", _object(predictions=_list(PREDICTION))),
    "waiting": (200, "application/json", _object(classes=_list(_object(name=TEXT, pictures=_list(PICTURE))))),
    "add_waiting": (201, "application/json", _object(name=TEXT, pictures=_list(PICTURE))),
    "remove_waiting": (200, "application/json", _object()),
    "thumbnail": (200, "image/jpeg", FILE),
    "lesson": (200, "application/json", {"anyOf": [LESSON, {"type": "null"}]}),
    "start_lesson": (202, "application/json", LESSON),
    "cancel_lesson": (202, "application/json", LESSON),
    "events": (200, "text/event-stream", TEXT),
    "rename_class": (200, "application/json", _object(name=TEXT)),
    "forget_class": (200, "application/json", _object()),
    "small_picture": (200, "image/jpeg", FILE),
    "undo": (200, "application/json", _object()),
    "settings": (200, "application/json", _object(keep_small_pictures=SWITCH)),
    "export": (200, "application/zip", FILE),
    "download": (200, "application/zip", FILE),
    "upload": (200, "application/json", _object()),
}


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """The OpenAPI 3.1 document of these routes."""
    paths: dict[str, Any] = {}
    for route in routes:
        for method in sorted(set(route.methods or ()) - {"HEAD"}):
            paths.setdefault(route.path, {})[method.lower()] = _operation(route)
    about = 'Teach a model classes of pictures and ask it what pictures show. Errors are JSON: {"error": "one line"}.'
    return {
        "openapi": "3.1.0",
        "info": {"title": "clipcil serve", "version": clipcil.__version__, "description": about},
        "paths": paths,
        "components": {
            "schemas": {"Error": _object(error=TEXT)},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


def _operation(route: Route) -> dict[str, Any]:
    name = route.endpoint.__name__
    status, kind, schema = ANSWERS[name]
    failed = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    operation: dict[str, Any] = {
        "operationId": name,
        "summary": inspect.getdoc(route.endpoint) or "",
        "responses": {
            str(status): {"description": "Done", "content": {kind: {"schema": schema}}},
            "default": {"description": "Refused or failed, with the reason in one line", "content": failed},
        },
    }
    if name in QUERIES:
        operation["parameters"] = [
            {"name": key, "in": "query", "required": required, "schema": schema}
            for key, schema, required in QUERIES[name]
        ]
    if name in BODIES:
        operation["requestBody"] = {"required": True, "content": BODIES[name]}
    return operation
