"""``farsight demo``: two live services on emulated devices under the same arrivals, side by side on a page."""
