"""WHERE SERVERS AND TRAINERS HOOK IN. Each module belongs to one framework and imports it when it is called, never before."""
