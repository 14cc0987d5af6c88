"""A page to teach a model by, and the same as a JSON API: `clipcil serve MODEL`."""
