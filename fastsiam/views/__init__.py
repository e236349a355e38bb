"""How one image becomes several views: what is drawn, and what that does to its colours."""
