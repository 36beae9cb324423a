/* Unary functions and their slopes, for one element of one type.
 *
 * The including file defines RULE_T, the type, and RULE, which precedes each function: nn_f64.c for
 * double, and kernels/unary.cu for float and double. In unary.cu, names are overloaded and `kind`
 * is a constant, so the compiler keeps only one case.
 */

RULE RULE_T sigmoid(RULE_T x)
{
    return (RULE_T)1 / ((RULE_T)1 + exp(-x));
}

RULE RULE_T gelu_inner(RULE_T x)
{
    return tanh((RULE_T)0.79788456080286535588 * (x + (RULE_T)0.044715 * x * x * x));
}

RULE RULE_T unary_value(fsdpc_unary kind, RULE_T x, RULE_T s)
{
    switch (kind) {
    case FSDPC_UNARY_NEG:
        return -x;
    case FSDPC_UNARY_ABS:
        return fabs(x);
    case FSDPC_UNARY_EXP:
        return exp(x);
    case FSDPC_UNARY_LOG:
        return log(x);
    case FSDPC_UNARY_SQRT:
        return sqrt(x);
    case FSDPC_UNARY_TANH:
        return tanh(x);
    case FSDPC_UNARY_SIGMOID:
        return sigmoid(x);
    case FSDPC_UNARY_GELU_TANH:
        return (RULE_T)0.5 * x * ((RULE_T)1 + gelu_inner(x));
    case FSDPC_UNARY_GELU_ERF:
        return (RULE_T)0.5 * x * ((RULE_T)1 + erf(x * (RULE_T)0.70710678118654752440));
    case FSDPC_UNARY_SILU:
        return x * sigmoid(x);
    case FSDPC_UNARY_RELU:
        return x < 0 ? (RULE_T)0 : x; /* NaN stays */
    case FSDPC_UNARY_RSQRT:
        return (RULE_T)1 / sqrt(x);
    case FSDPC_UNARY_SIN:
        return sin(x);
    case FSDPC_UNARY_COS:
        return cos(x);
    case FSDPC_UNARY_LOG1P:
        return log1p(x);
    case FSDPC_UNARY_EXPM1:
        return expm1(x);
    case FSDPC_UNARY_ERF:
        return erf(x);
    case FSDPC_UNARY_SIGN:
        return x > 0 ? (RULE_T)1 : x < 0 ? (RULE_T)-1 : x * 0;
    case FSDPC_UNARY_SOFTPLUS:
        return (x < 0 ? (RULE_T)0 : x) + log1p(exp(-fabs(x)));
    case FSDPC_UNARY_CLAMP_MIN:
        return x < s ? s : x; /* NaN stays */
    case FSDPC_UNARY_CLAMP_MAX:
        return x > s ? s : x;
    case FSDPC_UNARY_HUBER:
        return fabs(x) < s ? x * x * ((RULE_T)0.5 / s) : fabs(x) - (RULE_T)0.5 * s;
    case FSDPC_UNARY_ADD_SCALAR:
        return x + s;
    case FSDPC_UNARY_MUL_SCALAR:
        return x * s;
    case FSDPC_UNARY_RSUB_SCALAR:
        return s - x;
    case FSDPC_UNARY_RDIV_SCALAR:
        return s / x;
    case FSDPC_UNARY_POW_SCALAR:
        return pow(x, s);
    }
    return x;
}

/* dy * f'(x). y = f(x). */
RULE RULE_T unary_slope(fsdpc_unary kind, RULE_T x, RULE_T y, RULE_T dy, RULE_T s)
{
    switch (kind) {
    case FSDPC_UNARY_NEG:
    case FSDPC_UNARY_RSUB_SCALAR:
        return -dy;
    case FSDPC_UNARY_ABS:
        return x == 0 ? (RULE_T)0 : signbit(x) ? -dy : dy;
    case FSDPC_UNARY_EXP:
        return dy * y;
    case FSDPC_UNARY_LOG:
        return dy / x;
    case FSDPC_UNARY_SQRT:
        return (RULE_T)0.5 * dy / y;
    case FSDPC_UNARY_TANH:
        return dy * ((RULE_T)1 - y * y);
    case FSDPC_UNARY_SIGMOID:
        return dy * y * ((RULE_T)1 - y);
    case FSDPC_UNARY_GELU_TANH: {
        RULE_T t = gelu_inner(x);
        RULE_T slope =
            (RULE_T)0.79788456080286535588 * ((RULE_T)1 + (RULE_T)(3 * 0.044715) * x * x);
        return dy * ((RULE_T)0.5 * ((RULE_T)1 + t) + (RULE_T)0.5 * x * ((RULE_T)1 - t * t) * slope);
    }
    case FSDPC_UNARY_GELU_ERF: {
        RULE_T below = (RULE_T)0.5 * ((RULE_T)1 + erf(x * (RULE_T)0.70710678118654752440));
        return dy * (below + x * ((RULE_T)0.39894228040143267794 * exp((RULE_T)-0.5 * x * x)));
    }
    case FSDPC_UNARY_SILU: {
        RULE_T g = sigmoid(x);
        return dy * g * ((RULE_T)1 + x * ((RULE_T)1 - g));
    }
    case FSDPC_UNARY_RELU:
        return y > 0 ? dy : (RULE_T)0;
    case FSDPC_UNARY_RSQRT:
        return (RULE_T)-0.5 * dy * y * y * y;
    case FSDPC_UNARY_SIN:
        return dy * cos(x);
    case FSDPC_UNARY_COS:
        return -dy * sin(x);
    case FSDPC_UNARY_LOG1P:
        return dy / ((RULE_T)1 + x);
    case FSDPC_UNARY_EXPM1:
        return dy * (y + (RULE_T)1);
    case FSDPC_UNARY_ERF:
        return dy * ((RULE_T)1.12837916709551257390 * exp(-x * x));
    case FSDPC_UNARY_SIGN:
        return (RULE_T)0;
    case FSDPC_UNARY_SOFTPLUS:
        return dy * sigmoid(x);
    case FSDPC_UNARY_CLAMP_MIN:
        return x < s ? (RULE_T)0 : dy;
    case FSDPC_UNARY_CLAMP_MAX:
        return x > s ? (RULE_T)0 : dy;
    case FSDPC_UNARY_HUBER:
        return fabs(x) < s ? dy * x * ((RULE_T)1 / s) : x < 0 ? -dy : x > 0 ? dy : dy * x;
    case FSDPC_UNARY_ADD_SCALAR:
        return dy;
    case FSDPC_UNARY_MUL_SCALAR:
        return dy * s;
    case FSDPC_UNARY_RDIV_SCALAR:
        return -dy * s / (x * x);
    case FSDPC_UNARY_POW_SCALAR: /* x^0 is flat, even at x = 0 */
        return s == 0 ? (RULE_T)0 : dy * s * pow(x, s - (RULE_T)1);
    }
    return dy;
}
