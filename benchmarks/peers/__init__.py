"""What other people's programs look like, written here to measure against; nothing in clipcil imports them."""
