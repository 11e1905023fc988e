"""A page to see a trained network, attack it and pull its sliders: one HTML file that runs real networks offline."""
