"""A Docker engine, images and a Compose project for the deployment tests."""
