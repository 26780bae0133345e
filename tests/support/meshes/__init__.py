"""Whole meshes of real processes for the tests that need one."""
