"""One function, one figure, without pyplot: made of `forms`, in the colours of `style`; `draw` writes figures/."""
