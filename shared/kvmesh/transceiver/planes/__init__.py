"""How bytes of pages move between two engines: one module for each way, over the interface in ``base``."""
