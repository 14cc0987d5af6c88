"""Importing this module makes every dataset known by name."""

from clipcil.data import cifar100, emoji_set

__all__ = ["cifar100", "emoji_set"]
