"""HTML reports, charts and pictures of training runs."""
