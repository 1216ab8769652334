"""Requests and answers: options, sizes, errors, progress."""
