"""Importing this module makes every dataset known by name."""

from clipcil.data import cifar100, cub200, emoji_set, folder, hub_set, imagenet_r, parquet_set, ucf101

__all__ = ["cifar100", "cub200", "emoji_set", "folder", "hub_set", "imagenet_r", "parquet_set", "ucf101"]
