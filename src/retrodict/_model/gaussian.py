"""Gaussian laws in moment and natural form, and the integrals between them.

Scales come in two types: a dense lower Cholesky factor, which is an array of shape `(d, d)`, and
`Diagonal`, which holds d standard deviations. The type decides between them, never the shape.
"""

from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from retrodict._arrays import PRNGKey, Scalar, as_real_array, known_values
from retrodict._model.parameters import AbstractParameter, Frozen, as_parameter, check_lower, unwrap
from retrodict._numerics import UNROLLED, linalg, narrowness

LOG_2PI = float(np.log(2 * np.pi))


class Diagonal(eqx.Module):
    """A diagonal scale: independent coordinates with the given standard deviations.

    It is accepted wherever a `scale_tril` is.

    Example:
        >>> import jax.numpy as jnp, retrodict as rd
        >>> rd.Gaussian(jnp.zeros(2), rd.Diagonal([1.0, 2.0])).covariance.tolist()
        [[1.0, 0.0], [0.0, 4.0]]

    Args:
        std: standard deviations, of shape `(d,)`, at least zero; an array or a parameter such as
            `Positive`.
    """

    std: Any = eqx.field(converter=lambda value: as_parameter(value, "std"))

    def __check_init__(self) -> None:
        std = shape_of(self.std)
        if std is not None and len(std) != 1:
            raise ValueError(
                f"Diagonal expects std to be a vector of standard deviations, got shape {std}."
                " For a dense scale, pass its lower Cholesky factor without Diagonal."
            )
        values = known_values(unwrap(self.std))
        if values is not None and np.any(values < 0):
            raise ValueError(
                f"Diagonal expects standard deviations of at least zero, got {values}."
            )


Scale: TypeAlias = Any
"""A dense lower factor of shape `(d, d)`, a `Diagonal`, or a parameter for either."""


def shape_of(value: Any) -> tuple[int, ...] | None:
    """Return the shape of an array or of a parameter's value; `None` if it has no shape.

    Inside a transformation equinox rebuilds modules around placeholders, which have no shape and
    are not checked.
    """
    if isinstance(value, AbstractParameter):
        value = value.value
    return getattr(value, "shape", None)


def as_scale(scale: Any) -> Scale:
    """Convert the `scale_tril` argument of a constructor.

    The sign of each column of a lower factor is free: it does not change s sᵀ. Columns with a known
    negative pivot change their sign, so that the diagonal of a stored factor is at least zero.
    """
    if isinstance(scale, Frozen):
        return Frozen(as_scale(scale.tree))
    if isinstance(scale, Diagonal):
        return scale
    scale = as_parameter(scale, "scale_tril")
    if isinstance(scale, AbstractParameter) or scale.ndim != 2:
        return scale
    if scale.shape[0] == scale.shape[1]:
        check_lower("scale_tril", scale)
    values = known_values(scale)
    if values is None or not np.any(np.diagonal(values) < 0):
        return scale
    signs = np.where(np.diagonal(values) < 0, -1.0, 1.0).astype(values.dtype)
    return scale * signs[None, :]


def scale_dim(scale: Scale) -> int | None:
    """Return the number d of coordinates of a scale; `None` if it has no shape."""
    scale = unwrap(scale)
    shape = shape_of(scale.std if isinstance(scale, Diagonal) else scale)
    return shape[-1] if shape else None


def dense_scale(scale: Scale) -> Float[Array, "d d"]:
    """Return the lower factor, of shape `(d, d)`, of either type of scale."""
    return jnp.diag(scale.std) if isinstance(scale, Diagonal) else jnp.tril(scale)


def scale_matvec(scale: Scale, x: Float[Array, "d"]) -> Float[Array, "d"]:
    """Compute the product s x."""
    return scale.std * x if isinstance(scale, Diagonal) else linalg.matvec(jnp.tril(scale), x)


def scale_solve(scale: Scale, b: Float[Array, "d ..."]) -> Float[Array, "d ..."]:
    """Solve s x = b for a vector or a matrix b."""
    if isinstance(scale, Diagonal):
        return b / (scale.std if b.ndim == 1 else scale.std[:, None])
    return linalg.solve_triangular(scale, b)


def scale_inverse(scale: Scale, dtype: Any) -> Float[Array, "d d"]:
    """Return s⁻¹ as a dense matrix."""
    return scale_solve(scale, jnp.eye(scale_diagonal(scale).shape[0], dtype=dtype))


def scale_diagonal(scale: Scale) -> Float[Array, "d"]:
    """Return the diagonal of the lower factor."""
    return scale.std if isinstance(scale, Diagonal) else jnp.diagonal(scale)


def scale_log_det(scale: Scale) -> Scalar:
    """Compute log |det s|, half the log-determinant of the covariance."""
    return jnp.sum(jnp.log(jnp.abs(scale_diagonal(scale))))


def whitened_log_density(scale: Scale, count: Any, *residuals: Array) -> Scalar:
    """Compute −½ (Σ ‖r‖² + count log 2π) − log |det s|.

    Args:
        scale: s.
        count: the number of coordinates.
        *residuals: s⁻¹(x − m) for a log density; for an expected one, the mean of this vector and
            factors of its covariance.
    """
    squares = sum(jnp.sum(residual**2) for residual in residuals)
    return -0.5 * (squares + count * LOG_2PI) - scale_log_det(scale)


def masked_scale(scale: Scale, mask: Float[Array, "d"]) -> Float[Array, "d d"] | Diagonal:
    """Return a scale whose observed block is that of the marginal law of the observed coordinates.

    Unobserved coordinates become independent, with standard deviation 1. They contribute nothing to
    the log-determinant, nor to the squared residuals if the residuals are zero there.

    Args:
        scale: the scale of all coordinates.
        mask: 1 where a coordinate was observed, 0 elsewhere.
    """
    if isinstance(scale, Diagonal):
        return Diagonal(jnp.where(mask > 0, scale.std, 1.0))
    lower = jnp.tril(scale)

    def from_rows() -> Array:
        # The factor's rows for observed coordinates, and unit rows for the others.
        return linalg.tria(jnp.concatenate([lower * mask[:, None], jnp.diag(1.0 - mask)], axis=1))

    def from_covariance() -> Array:
        covariance = linalg.outer_gram(lower)
        return linalg.cholesky(covariance * mask[None, :] * mask[:, None] + jnp.diag(1.0 - mask))

    if lower.shape[0] <= UNROLLED:
        return from_rows()
    # Marginal laws have no narrower direction than the joint law. The choice does not depend on the
    # mask, so that under `vmap` over masks one form is computed.
    return lax.cond(
        narrowness(lower) > linalg.smallest_share(lower.dtype), from_covariance, from_rows
    )


class Gaussian(eqx.Module):
    """The law N(m, s sᵀ) on R^d.

    Example:
        >>> import jax.numpy as jnp, retrodict as rd
        >>> law = rd.Gaussian(jnp.zeros(2), jnp.eye(2))
        >>> round(float(law.log_prob(jnp.zeros(2))), 4)
        -1.8379

    Args:
        mean: m, of shape `(d,)`.
        scale_tril: s, a lower Cholesky factor of shape `(d, d)`, or a `Diagonal`. Nonzero entries
            above the diagonal raise an error; inside `jax.jit`, where values are unknown, they are
            dropped. Columns with a negative pivot change their sign, which does not change s sᵀ.
    """

    mean: Any = eqx.field(converter=lambda value: as_parameter(value, "mean"))
    scale_tril: Scale = eqx.field(converter=as_scale)

    def __check_init__(self) -> None:
        mean = shape_of(self.mean)
        if mean is None:
            return
        if len(mean) != 1:
            raise ValueError(
                f"Gaussian expects a mean of shape (d,), got {mean}. For a batch of laws, build"
                " them under jax.vmap."
            )
        check_scale("Gaussian", self.scale_tril, mean[0])

    @classmethod
    def from_covariance(cls, mean: Any, covariance: Any) -> "Gaussian":
        """Build the law from its covariance, which must be positive definite."""
        return cls(mean, factor_of_covariance("Gaussian.from_covariance", covariance))

    @property
    def dim(self) -> int:
        """The dimension d."""
        return jnp.shape(unwrap(self.mean))[-1]

    @property
    def covariance(self) -> Float[Array, "*batch d d"]:
        """The covariance s sᵀ; a batch of laws gives a batch of covariances."""
        scale = unwrap(self.scale_tril)
        if isinstance(scale, Diagonal):
            return jnp.vectorize(jnp.diag, signature="(d)->(d,d)")(scale.std**2)
        return _covariance(scale)

    @property
    def std(self) -> Float[Array, "*batch d"]:
        """The standard deviation of each coordinate."""
        scale = unwrap(self.scale_tril)
        if isinstance(scale, Diagonal):
            return jnp.abs(scale.std)
        return jnp.linalg.norm(jnp.tril(scale), axis=-1)

    def log_prob(self, x: Float[Array, "d"]) -> Scalar:
        """Compute the log density log N(x; m, s sᵀ)."""
        law = unwrap(self)
        return whitened_log_density(
            law.scale_tril, law.dim, scale_solve(law.scale_tril, x - law.mean)
        )

    def masked_log_prob(self, x: Float[Array, "d"], mask: Float[Array, "d"]) -> Scalar:
        """Compute the log density of the marginal law of the coordinates where `mask` is 1."""
        law = unwrap(self)
        scale = masked_scale(law.scale_tril, mask)
        residual = jnp.where(mask > 0, x - law.mean, 0.0)
        return whitened_log_density(scale, jnp.sum(mask), scale_solve(scale, residual))

    def sample(self, key: PRNGKey, sample_shape: tuple[int, ...] = ()) -> Float[Array, "*shape d"]:
        """Draw m + s ε with standard normal ε."""
        law = unwrap(self)
        noise = jax.random.normal(key, (*sample_shape, law.dim), law.mean.dtype)
        return jax.vmap(law.from_noise)(noise.reshape(-1, law.dim)).reshape(noise.shape)

    @property
    def noise_dim(self) -> int:
        """The number of standard normal variates per draw."""
        return self.dim

    def from_noise(self, noise: Float[Array, "d"]) -> Float[Array, "d"]:
        """Map standard normal noise ε to the draw m + s ε."""
        law = unwrap(self)
        return law.mean + scale_matvec(law.scale_tril, noise)

    def entropy(self) -> Scalar:
        """Compute the entropy ½ d (1 + log 2π) + log |det s|."""
        law = unwrap(self)
        return 0.5 * law.dim * (1.0 + LOG_2PI) + scale_log_det(law.scale_tril)

    def to_natural(self) -> "NaturalGaussian":
        """Return the natural parameters (Σ⁻¹ m, Σ⁻¹) of the law."""
        law = unwrap(self)
        whitener = scale_inverse(law.scale_tril, law.mean.dtype)
        precision = linalg.matmul(whitener.T, whitener)
        return NaturalGaussian(linalg.matvec(precision, law.mean), precision)


class NaturalGaussian(eqx.Module):
    """A Gaussian law in natural parameters: density ∝ exp(ηᵀx − ½ xᵀΛx).

    Natural parameters add when densities are multiplied. Thus `+` conditions a law on further
    evidence.

    Args:
        precision_mean: η = Σ⁻¹ m, of shape `(d,)`.
        precision: Λ = Σ⁻¹, symmetric, of shape `(d, d)`.
    """

    precision_mean: Float[Array, "d"] = eqx.field(
        converter=lambda value: as_real_array(value, "precision_mean")
    )
    precision: Float[Array, "d d"] = eqx.field(
        converter=lambda value: as_real_array(value, "precision")
    )

    def __check_init__(self) -> None:
        mean, precision = shape_of(self.precision_mean), shape_of(self.precision)
        if mean is not None and (len(mean) != 1 or precision != mean * 2):
            raise ValueError(
                "NaturalGaussian expects precision_mean of shape (d,) and precision of shape (d,"
                f" d), got {mean} and {precision}."
            )

    def __add__(self, other: "NaturalGaussian") -> "NaturalGaussian":
        """Return the (unnormalised) product of two densities."""
        return NaturalGaussian(
            self.precision_mean + other.precision_mean, self.precision + other.precision
        )

    def to_moments(self) -> Gaussian:
        """Return the law with its mean and lower Cholesky factor; Λ must be positive definite."""
        # With Λ = UUᵀ for an upper U, Σ = U⁻ᵀU⁻¹ and U⁻ᵀ is lower. Σ need not be factored again.
        upper = linalg.cholesky(self.precision[::-1, ::-1])[::-1, ::-1]
        eye = jnp.eye(self.precision.shape[0], dtype=self.precision.dtype)
        scale = linalg.solve_triangular(upper.T, eye)
        mean = linalg.matvec(scale, linalg.matvec(scale.T, self.precision_mean))
        return Gaussian(mean, scale)


def kl_divergence(q: Gaussian, p: Gaussian) -> Scalar:
    """Compute the Kullback–Leibler divergence of q from p.

    KL(q ‖ p) = ½ (tr(Σ_p⁻¹Σ_q) + ‖s_p⁻¹(m_p − m_q)‖² − d) + log |s_p| − log |s_q|.

    Example:
        >>> import jax.numpy as jnp, retrodict as rd
        >>> law = rd.Gaussian(jnp.ones(2), jnp.eye(2))
        >>> float(rd.kl_divergence(law, law))
        0.0
    """
    q, p = unwrap(q), unwrap(p)
    ratio = scale_solve(p.scale_tril, dense_scale(q.scale_tril))
    shift = scale_solve(p.scale_tril, p.mean - q.mean)
    squares = jnp.sum(ratio**2) + jnp.sum(shift**2)
    return 0.5 * (squares - q.dim) + scale_log_det(p.scale_tril) - scale_log_det(q.scale_tril)


def check_scale(owner: str, scale: Scale, dim: int) -> None:
    """Raise a `ValueError` unless a scale has shape `(dim, dim)` and is lower triangular."""
    scale = unwrap(scale)
    if isinstance(scale, Diagonal):
        shape = shape_of(scale.std)
        if shape is not None and shape != (dim,):
            raise ValueError(f"{owner} expects a Diagonal scale of shape ({dim},), got {shape}.")
        return
    shape = shape_of(scale)
    if shape is not None and shape != (dim, dim):
        raise ValueError(
            f"{owner} expects scale_tril of shape ({dim}, {dim}), a lower Cholesky factor, got"
            f" {shape}. For independent coordinates pass Diagonal(std)."
        )
    check_lower("scale_tril", scale)


@jax.jit
def _covariance(scale: Float[Array, "*batch d d"]) -> Float[Array, "*batch d d"]:
    gram = jnp.vectorize(linalg.outer_gram, signature="(d,d)->(d,d)")
    return gram(jnp.tril(scale))


def factor_of_covariance(owner: str, covariance: Any) -> Float[Array, "d d"]:
    """Compute the lower Cholesky factor of a covariance.

    Raises:
        ValueError: if the covariance is known and not finite, symmetric and positive definite.
    """
    covariance = as_real_array(covariance, "covariance")
    if covariance.ndim != 2 or covariance.shape[0] != covariance.shape[1]:
        raise ValueError(f"{owner} expects a square covariance, got shape {covariance.shape}.")
    values = known_values(covariance)
    if values is not None:
        if not np.all(np.isfinite(values)):
            raise ValueError(
                f"{owner} expects a positive-definite covariance of finite values, got\n{values}."
            )
        if not np.allclose(values, values.T, rtol=1e-5, atol=1e-8 * np.abs(values).max(initial=0)):
            raise ValueError(f"{owner} expects a symmetric covariance, got\n{values}.")
        if np.linalg.eigvalsh(values)[0] <= 0:
            raise ValueError(
                f"{owner} expects a positive-definite covariance, got\n{values}.\nFor singular"
                " noise, pass a scale_tril whose columns span its support."
            )
    return linalg.cholesky(covariance)
