"""Composition root, HTTP ingress and command line."""

from farsight_rooms import check_rooms

check_rooms()
