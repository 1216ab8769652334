"""Texts and rows from files, folders and the Hub, and their packing into sequences."""
