"""What simulated trajectories do: their scripts, where those come from, and the environment that plays them."""
