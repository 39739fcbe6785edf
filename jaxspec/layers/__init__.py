"""Parts that models and drafts are made of: products, attention, experts, and the parameter tables that describe weights."""
