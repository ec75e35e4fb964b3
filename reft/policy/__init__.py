"""Decides how the state is protected: by which scheme, and how often versions are taken."""
