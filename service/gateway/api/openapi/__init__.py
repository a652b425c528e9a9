"""The OpenAPI document: what each route takes, what it answers, and with which statuses."""
