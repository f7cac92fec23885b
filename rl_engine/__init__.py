"""rl-engine: losses of RL post-training whose bits do not depend on the layout."""
