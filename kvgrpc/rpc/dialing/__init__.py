"""Channels to servers, and how a call is tried again."""
