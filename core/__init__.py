"""The vocabulary of Farsight: requests, messages, configuration, errors. Imports no other room."""
