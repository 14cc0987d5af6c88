"""A web page for teaching a model, and the same as a JSON API: `clipcil serve MODEL`."""
