"""Maps that transport stored statistics when the vision tower changes."""
