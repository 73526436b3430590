// Kernels of a decode step on CPUs, called through XLA's foreign function interface.
//
// kernels.py builds and wraps them. Activations are feature-major [in, B], as in forward.py, for B
// slots. Everything is float32, but for weights of 8 bits.

#include "attention.h"
#include "delta_step.h"
#include "products.h"

#define BIND ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()
#define FLOATS Arg<ffi::Buffer<ffi::F32>>()
#define BYTES Arg<ffi::Buffer<ffi::S8>>()
#define INTS Arg<ffi::Buffer<ffi::S32>>()
#define RESULT Ret<ffi::Buffer<ffi::F32>>()
#define NORM Attr<float>("eps").Attr<float>("offset")

// weight, x, norm
XLA_FFI_DEFINE_HANDLER_SYMBOL(product, Product, BIND.FLOATS.FLOATS.FLOATS.NORM.RESULT);

// weight, x, norm
XLA_FFI_DEFINE_HANDLER_SYMBOL(gated_product, GatedProduct,
                              BIND.FLOATS.FLOATS.FLOATS.NORM
                                  .Attr<int64_t>("activation")
                                  .RESULT);

// weight, scales, x, norm
XLA_FFI_DEFINE_HANDLER_SYMBOL(quantized_product, QuantizedProduct,
                              BIND.BYTES.FLOATS.FLOATS.FLOATS.NORM.RESULT);

// weight, scales, x, norm
XLA_FFI_DEFINE_HANDLER_SYMBOL(quantized_gated_product, QuantizedGatedProduct,
                              BIND.BYTES.FLOATS.FLOATS.FLOATS.NORM
                                  .Attr<int64_t>("activation")
                                  .RESULT);

// weight, x, group
XLA_FFI_DEFINE_HANDLER_SYMBOL(grouped_product, GroupedProduct, BIND.FLOATS.FLOATS.INTS.RESULT);

// qkv, keys, values, pages, positions, cos, sin, sinks -> mixed, keys, values
XLA_FFI_DEFINE_HANDLER_SYMBOL(decode_attention, DecodeAttention,
                              BIND.FLOATS.FLOATS.FLOATS.INTS.INTS.FLOATS.FLOATS.FLOATS
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window")
                                  .Attr<bool>("interleaved")
                                  .RESULT.RESULT.RESULT);

// queries, keys, values, pages, positions, cos, sin, sinks -> mixed
XLA_FFI_DEFINE_HANDLER_SYMBOL(read_attention, ReadAttention,
                              BIND.FLOATS.FLOATS.FLOATS.INTS.INTS.FLOATS.FLOATS.FLOATS
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window")
                                  .Attr<bool>("interleaved")
                                  .RESULT);

// queries, keys, values, decays, betas, states, running -> outputs, states
XLA_FFI_DEFINE_HANDLER_SYMBOL(delta_step, DeltaStep,
                              BIND.FLOATS.FLOATS.FLOATS.FLOATS.FLOATS.FLOATS.INTS.RESULT.RESULT);
