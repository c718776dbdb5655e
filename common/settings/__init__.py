"""The configuration: a frozen model for each section, with the keys of the section as its attributes."""
