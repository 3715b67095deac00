"""HTML pages from templates, and figures, in one style for runs and experiments."""

from retrodict._pages.figures import render_figure as render_figure
from retrodict._pages.html import render_page as render_page
from retrodict._pages.html import visible as visible
