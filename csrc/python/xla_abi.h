/* The part of XLA's foreign function interface (its public C ABI, version 0) that xla_ffi.c uses.
 *
 * Every struct begins with its size in bytes, as the other side knows it, and with a list of
 * extensions. Later minor versions only add fields at the end, so a field may be read if the size
 * covers it. Functions that fail return an error object, others NULL. */
#ifndef PMPY_XLA_ABI_H
#define PMPY_XLA_ABI_H

#include <stddef.h>
#include <stdint.h>

enum { XLA_ABI_MAJOR = 0, XLA_ABI_MINOR = 3 };

typedef struct xla_extension {
  size_t struct_size;
  int type; /* XLA_EXTENSION_METADATA: an xla_metadata_extension */
  struct xla_extension *next;
} xla_extension;
enum { XLA_EXTENSION_METADATA = 1 };

typedef struct xla_version {
  size_t struct_size;
  xla_extension *extensions;
  int major, minor;
} xla_version;

typedef struct xla_metadata {
  size_t struct_size;
  xla_version version;
  uint32_t traits;
} xla_metadata;
enum { XLA_TRAIT_COMMAND_BUFFER = 1 }; /* launches the same work each time, may be recorded */

typedef struct xla_metadata_extension {
  xla_extension base;
  xla_metadata *metadata;
} xla_metadata_extension;

typedef struct xla_error xla_error;
typedef struct xla_error_create {
  size_t struct_size;
  xla_extension *extensions;
  const char *message; /* copied */
  int code;
} xla_error_create;
enum {
  XLA_INVALID_ARGUMENT = 3,
  XLA_RESOURCE_EXHAUSTED = 8,
  XLA_FAILED_PRECONDITION = 9,
  XLA_ABORTED = 10,
  XLA_UNIMPLEMENTED = 12,
  XLA_INTERNAL = 13
};

typedef struct xla_context xla_context;
typedef struct xla_stream_get {
  size_t struct_size;
  xla_extension *extensions;
  xla_context *context;
  void *stream; /* out: a CUstream */
} xla_stream_get;

typedef struct xla_api {
  size_t struct_size;
  xla_extension *extensions;
  xla_version version;
  const void *internal;
  xla_error *(*error_create)(xla_error_create *);
  void *error_message, *error_destroy, *handler_register;
  xla_error *(*stream_get)(xla_stream_get *);
} xla_api;

typedef struct xla_buffer {
  size_t struct_size;
  xla_extension *extensions;
  int dtype;
  void *data;
  int64_t rank;
  int64_t *dims;
} xla_buffer;

/* Operands or results. */
typedef struct xla_buffers {
  size_t struct_size;
  xla_extension *extensions;
  int64_t size;
  int *types; /* 1: an xla_buffer */
  void **at;
} xla_buffers;

typedef struct xla_span {
  const char *at;
  size_t size;
} xla_span;

typedef struct xla_attributes {
  size_t struct_size;
  xla_extension *extensions;
  int64_t size;
  int *types; /* XLA_STRING: an xla_span */
  xla_span **names;
  void **at;
} xla_attributes;
enum { XLA_STRING = 4 };

typedef struct xla_call {
  size_t struct_size;
  xla_extension *extensions;
  const xla_api *api;
  xla_context *context;
  int stage;
  xla_buffers operands, results;
  xla_attributes attributes;
} xla_call;
enum { XLA_INSTANTIATE, XLA_PREPARE, XLA_INITIALIZE, XLA_EXECUTE };

#endif
