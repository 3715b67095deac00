"""The classes and functions that a checkpoint may name, each by its exact name.

The author of a file chooses its names and values. A loaded object calls its functions when it is
used, with arguments from the same file. An entry must therefore be harmless for all arguments: it
computes with arrays, and imports, evaluates, reads and writes nothing. Functions that take a
function are excluded, since no model needs one.

To add an entry, also increase `NAMES_VERSION`: older readers then ask to upgrade.
"""

NAMES_VERSION = 4
"""The version of this list. Version 0 is release 0.1, which looked up names anywhere in six
packages; version 2 contains the modules of `RENAMED`."""

_ACTIVATIONS = """
    celu elu gelu glu hard_sigmoid hard_silu hard_swish hard_tanh identity leaky_relu log_sigmoid
    log_softmax logsumexp mish relu relu6 selu sigmoid silu soft_sign softmax softplus sparse_plus
    sparse_sigmoid squareplus standardize swish tanh
"""

_ELEMENTWISE = """
    abs absolute add arccos arccosh arcsin arcsinh arctan arctan2 arctanh cbrt ceil clip cos cosh
    deg2rad degrees divide exp exp2 expm1 fabs float_power floor fmax fmin hypot log log10 log1p
    log2 logaddexp logaddexp2 maximum minimum mod multiply negative positive power rad2deg radians
    reciprocal remainder round sign sin sinc sinh sqrt square subtract tan tanh true_divide
"""

_ARRAYS = """
    concatenate cross cumprod cumsum diag dot inner matmul max mean median min outer prod ravel std
    sum transpose tril triu vdot where
"""

_SPECIAL = """
    digamma entr erf erfc erfinv expit gammainc gammaincc gammaln i0 i0e i1 i1e log_ndtr logit
    logsumexp ndtr ndtri softmax xlog1py xlogy
"""

FUNCTIONS: dict[str, str] = {
    "jax.nn": _ACTIVATIONS,
    "jax.numpy": _ELEMENTWISE + _ARRAYS,
    "jax.numpy.linalg": "cholesky det inv norm slogdet",
    "jax.lax": "abs cos erf exp expm1 log log1p logistic rsqrt sin sqrt square tan tanh",
    "jax.scipy.special": _SPECIAL,
    # The default activation of the last layer of an MLP, which has no public name.
    "equinox.nn._mlp": "_identity",
}
"""Functions by module."""

DTYPES: dict[str, str] = {
    "jax.numpy": """
        bfloat16 bool complex128 complex64 float16 float32 float64 int16 int32 int64 int8 uint16
        uint32 uint64 uint8
    """,
    "numpy": """
        bool complex128 complex64 float16 float32 float64 int16 int32 int64 int8 uint16 uint32
        uint64 uint8
    """,
}
"""Dtypes by module."""

ENUMS: dict[str, str] = {"jax.lax": "Precision"}
"""Enumerations by module."""

CLASSES: dict[str, str] = {
    "equinox.nn": """
        AvgPool1d AvgPool2d AvgPool3d Conv Conv1d Conv2d Conv3d ConvTranspose ConvTranspose1d
        ConvTranspose2d ConvTranspose3d Dropout Embedding GRUCell GroupNorm Identity LSTMCell Lambda
        LayerNorm Linear MLP MaxPool1d MaxPool2d MaxPool3d MultiheadAttention PReLU RMSNorm
        RotaryPositionalEmbedding Sequential
    """,
    "numpyro.distributions": """
        AsymmetricLaplace BernoulliLogits BernoulliProbs Beta BetaBinomial BinomialLogits
        BinomialProbs CategoricalLogits CategoricalProbs Cauchy Chi2 Dirichlet DirichletMultinomial
        DiscreteUniform ExpandedDistribution Exponential Gamma GammaPoisson GeometricLogits
        GeometricProbs Gumbel HalfCauchy HalfNormal Independent InverseGamma Laplace LogNormal
        Logistic LowRankMultivariateNormal MaskedDistribution MixtureSameFamily MultinomialLogits
        MultinomialProbs MultivariateNormal MultivariateStudentT NegativeBinomial2
        NegativeBinomialLogits NegativeBinomialProbs Normal Pareto Poisson SoftLaplace StudentT
        TransformedDistribution Uniform VonMises Weibull ZeroInflatedPoisson
    """,
    "numpyro.distributions.constraints": "_Real _Positive _Interval _GreaterThan",
    "numpyro.distributions.transforms": "AffineTransform ExpTransform",
    # States only: an optimiser consists of functions.
    "optax": """
        AddNoiseState ApplyIfFiniteState EmaState EmptyState FactoredState
        InjectHyperparamsState InjectStatefulHyperparamsState MaskedNode MaskedState MultiStepsState
        PartitionState ScaleByAdaDeltaState ScaleByAdamState ScaleByAdanState ScaleByAmsgradState
        ScaleByBacktrackingLinesearchState ScaleByBeliefState ScaleByLBFGSState ScaleByLionState
        ScaleByNovogradState ScaleByRStdDevState ScaleByRmsState ScaleByRssState
        ScaleByScheduleState ScaleByZoomLinesearchState
        TraceState ZoomLinesearchInfo
    """,
    "retrodict": """
        AdditiveFunctional AssimilationFamily BackwardSampling Bounded ClosedForm
        ConjugateFamily Cubature Diagonal DistributionKernel FitResult Forecast Frozen
        GatedFamily GaussHermite Gaussian GaussianMixture Grid GridPosterior InitialTerm
        KalmanFamily LinearGaussianChain LinearGaussianKernel LogJoint MixtureFamily
        NonlinearFamily NonlinearGaussianKernel PairTerm
        ParameterErrors ParticlePosterior Positive PositiveTril Quadrature RaoBlackwellised
        RecurrentFamily Recursive SampledChain ScanFamily Score SecondMoments Series Smoothed
        StateFunctional StateSpaceModel StateSum StateTerm Taylor Unscented
        VaryingLinearGaussianKernel
    """,
    "retrodict._exact.kalman_smoother": "KalmanPosterior",
    "retrodict._expectations.expectation": "Estimate Marginals",
    "retrodict._expectations.recursive": "RecursiveState",
    "retrodict._learning.em": "EMResult",
    "retrodict._learning.fit_evidence": "EvidenceResult",
    "retrodict._linearised.posterior": "Diagnostics LinearisedPosterior",
    "retrodict._smooth.simulate_like": "Simulated",
    "retrodict.bounds": """
        AnyBounded AnyLipschitz ErrorBound FiniteBounds FiniteProblem Mixing PosteriorCheck
    """,
    "retrodict.online": """
        FixedLag KalmanScore LagOutput LagRows LagState
        LaggedLearnerState LearnerOutput LearnerState OnlineOutput OnlineSmoother QuadraticFeatures
        RandomFeatures RecursivePathwise RecursiveScore RowGradient RunningOutput RunningPosterior
        RunningState TruncatedBackprop WeightedSamples
    """,
    "retrodict.particles": """
        AdditivePosterior AdditiveSmoother ChainProposal ExactBackward Genealogy Guided
        GuidedPosterior ImportancePosterior MCMCBackward OnlineState ParticleFilterPosterior
        RejectionBackward
    """,
    "retrodict.switching": """
        Mixture Moves RaoBlackwellisedPosterior RegimeHistories RegimeProbabilities Regimes
        SwitchingChain SwitchingFamily SwitchingFit SwitchingForecast SwitchingGridPosterior
        SwitchingImportance SwitchingMarginals SwitchingModel SwitchingPosterior
    """,
    # Private records within the public ones.
    "retrodict.bounds.finite.bounds": "FiniteContributions",
    "retrodict.bounds.finite.quantities": "FiniteQuantities",
    "retrodict._chains.defensive": "DefensiveKernel DefensiveLaw DefensiveStep",
    "retrodict._numerics.gaussian_law": "GaussianLaw",
    "retrodict._numerics.standard": "StandardKernel",
    "retrodict._families.base": "Factor",
    "retrodict._families.network": "Embedded RecurrentState Transition",
    "retrodict._families.recurrent": "BackwardStart",
    "retrodict._families.recursions": "GaussianState",
    "retrodict._families.start": "Coordinates",
    "retrodict._families.assimilation": "Sites",
    "retrodict._families.conjugate": "Potential",
    "retrodict._families.kalman": "Evidence FilterState",
    "retrodict._families.mixture": "MixtureKernel MixtureStep",
    "retrodict._families.nonlinear": """
        MixtureCorrection NonlinearKernel NonlinearMixtureKernel NonlinearStep
    """,
    "retrodict._families.scan": "ScanLayer ScanState",
    "retrodict._expectations.functionals": """
        LogEmission LogPrior LogTransition SecondMomentSums
    """,
    "retrodict._exact.grid.diagnosis": "Diagnostics ErrorEstimate",
    "retrodict._exact.grid.posterior": "Held",
    "retrodict.online.exact": "BoundState ExactStatistics",
    "retrodict.online.quantities": "Quantities Sums",
    "retrodict.online.kalman": "KalmanScoreState",
    "retrodict.online.pathwise": "PathwiseState StandardCoordinates",
    "retrodict.online.samples": "SampleStatistics",
    "retrodict.online.score": "ScoreState",
    "retrodict.online.sensitivity": "StateWithJacobian",
    "retrodict.online.truncated": "TruncatedState",
    "retrodict._model.gaussian": "NaturalGaussian",
    "retrodict._model.parameters": "StationaryCoefficients",
    "retrodict.particles.cloud": "Filter",
    "retrodict.particles.proposal": "_MeanLookahead",
    "retrodict._learning.train": "TrainHistory TrainState",
    "retrodict.switching.autoregression": "AutoregressiveEmission",
    "retrodict.switching.enumeration": "Enumeration",
    "retrodict.switching.model": "Stacked",
    "retrodict.switching.product": "ProductPrior ProductRegimes ProductTransition",
    "retrodict.switching.family": "Look SwitchingRow SwitchingState",
    "retrodict.switching.model": "Stacked",
    "retrodict.models._counts": "BinomialLaw NegativeBinomialLaw PoissonLaw",
    "retrodict.models._equations": """
        ConstantVelocity Lagged LinearDynamics MeanReverting Observed Regular Stationary Structural
    """,
    "retrodict.models._neural": "ObservationStd",
    "retrodict.models._tracking": """
        RangeAndBearing RangeBearingLaw RangeBearingStd WrappedRangeBearing
    """,
    "retrodict.models._by_regime": """
        ByRegime StationaryRegimes SwitchingNoise SwitchingNormal SwitchingPoisson SwitchingWalk
        TransitionProbabilities
    """,
    "retrodict.models._volatility": "VolatilityEmission",
}
"""Classes by module of which a file may contain instances."""


MOVED_PACKAGES: dict[str, str] = {
    "_bounds": "bounds",
    "_chain": "_chains",
    "_family": "_families",
    "_grid": "_exact.grid",
    "_online": "online",
    "_particle": "particles",
}
"""Packages that moved since release 0.1; their modules have lost a leading underscore."""

RENAMED: dict[str, str] = {
    "retrodict._families.readout": "retrodict._families.recurrent",
    "retrodict._family._base:Row": "retrodict:Series",
    "retrodict._functional": "retrodict._expectations.functionals",
    "retrodict._linearised.diagnosis": "retrodict._linearised.posterior",
    "retrodict._mask:Series": "retrodict:Series",
    "retrodict._parameters": "retrodict._model.parameters",
    "retrodict._train": "retrodict._learning.train",
    "retrodict:LagMoments": "retrodict._expectations.expectation:Marginals",
    "retrodict:LaggedLearnerOutput": "retrodict.online:LearnerOutput",
    "retrodict:Observations": "retrodict:Series",
    "retrodict:RunningElboState": "retrodict.online.exact:BoundState",
}
"""New names of other modules, and of classes `module:name`, since release 0.1."""


def current_name(name: str) -> str:
    """Return the current form of a name `module:attribute` from a file.

    A class that left `retrodict` is looked up in the one other module that lists it.
    """
    module, _, attribute = RENAMED.get(name, name).partition(":")
    if module == "retrodict" and name not in RECORD_NAMES:
        module = next((m for m, text in CLASSES.items() if attribute in text.split()), module)
    library, _, place = module.partition(".")
    package, _, inner = place.partition(".")
    if library == "retrodict" and package in MOVED_PACKAGES:
        module = f"retrodict.{MOVED_PACKAGES[package]}.{inner.removeprefix('_')}"
    return f"{RENAMED.get(module, module)}:{attribute}"


def _names(table: dict[str, str]) -> frozenset[str]:
    return frozenset(f"{module}:{name}" for module, text in table.items() for name in text.split())


RECORD_NAMES = _names(CLASSES)
"""Names of classes of which a file may contain instances."""

VALUE_NAMES = _names(FUNCTIONS) | _names(DTYPES)
"""Names that a file may contain as values: functions and dtypes."""

ENUM_NAMES = _names(ENUMS)
"""Names of enumerations of which a file may contain a member."""

FUNCTION_NAMES = _names(FUNCTIONS)
"""Names of functions of which a file may contain a partial."""
