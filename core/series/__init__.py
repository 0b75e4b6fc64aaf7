"""The history of a service's measurements, in bounded memory."""
