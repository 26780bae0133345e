"""Channels move contiguous bytes between the staging regions of two engines, one module for each library."""
