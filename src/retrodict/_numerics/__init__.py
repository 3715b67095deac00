"""Linear algebra for small matrices, Gaussian updates and scans on plain arrays."""

from retrodict._numerics import linalg as linalg
from retrodict._numerics.associative_scan import affine_suffix_paths as affine_suffix_paths
from retrodict._numerics.associative_scan import affine_suffix_scan as affine_suffix_scan
from retrodict._numerics.associative_scan import linear_recurrence as linear_recurrence
from retrodict._numerics.associative_scan import prefix_scan as prefix_scan
from retrodict._numerics.batched_map import in_parts as in_parts
from retrodict._numerics.ldl import Factored as Factored
from retrodict._numerics.ldl import Innovations as Innovations
from retrodict._numerics.ldl import StandardKernel as StandardKernel
from retrodict._numerics.ldl import condition as condition
from retrodict._numerics.ldl import condition_columns as condition_columns
from retrodict._numerics.ldl import narrowest as narrowest
from retrodict._numerics.ldl import predict as predict
from retrodict._numerics.ldl import propagate as propagate
from retrodict._numerics.ldl import reverse as reverse
from retrodict._numerics.ldl import reverse_rows as reverse_rows
from retrodict._numerics.ldl import reverse_standardised as reverse_standardised
from retrodict._numerics.linalg import UNROLLED as UNROLLED
from retrodict._numerics.linalg import sum_of as sum_of
