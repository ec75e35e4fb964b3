"""How fast each rank is, and what the job loses."""
