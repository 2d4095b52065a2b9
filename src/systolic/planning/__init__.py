"""The right slice and layout for a job: what is searched, by which rules, towards which goal."""
