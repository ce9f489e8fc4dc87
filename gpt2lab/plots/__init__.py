"""One function, one figure, without pyplot: `style` holds colours and sizes, `draw` writes figures/."""
