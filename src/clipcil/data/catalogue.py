"""Importing this module makes every dataset known by name."""

from clipcil.data import cifar100, cub200, emoji_set, folder

__all__ = ["cifar100", "cub200", "emoji_set", "folder"]
