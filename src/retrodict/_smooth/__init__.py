"""`smooth`: choose a smoother, train one if needed, and check its answer."""

from retrodict._smooth.simulate_like import Simulated as Simulated
from retrodict._smooth.simulate_like import simulate_like as simulate_like
from retrodict._smooth.smooth import smooth as smooth
from retrodict._smooth.smoothed import Smoothed as Smoothed
