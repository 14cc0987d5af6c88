"""Classifiers on features."""
