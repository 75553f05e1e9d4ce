"""Values: plans and what they rest on, and their documents."""
