"""Maps that carry stored statistics along when the vision tower moves."""
