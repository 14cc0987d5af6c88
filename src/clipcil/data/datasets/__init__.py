"""Every module here registers its datasets when it is imported."""
