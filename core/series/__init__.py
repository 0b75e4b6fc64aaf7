"""What a service measured of itself over time, in bounded memory."""
