"""Speed and results on a card, and plans for one."""
