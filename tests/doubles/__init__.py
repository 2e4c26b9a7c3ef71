"""What several folders of tests put in the place of a clock."""
