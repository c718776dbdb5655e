"""The chains that flow into a target: their beginnings, segments, holes and turns."""
