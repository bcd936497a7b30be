"""update: unscale, clip and update the own masters and moments."""
