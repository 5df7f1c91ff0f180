"""Measuring: each benchmark gives its figures as plain data, its command prints them."""
