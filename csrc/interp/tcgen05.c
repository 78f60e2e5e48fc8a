/* Tensor memory, tcgen05 products, cluster launch control, copies of rows. */
#include "races.h"

const handler pm_vm_GATHER_G2S = {pm_vm_encode_missing, NULL, {0}};
const handler pm_vm_SCATTER_S2G = {pm_vm_encode_missing, NULL, {0}};
const handler pm_vm_TRY_CANCEL = {pm_vm_encode_missing, NULL, {0}};
const handler pm_vm_QUERY_CANCEL = {pm_vm_encode_missing, NULL, {0}};
const handler pm_vm_ALLOC_TMEM = {pm_vm_encode_missing, NULL, {0}};
const handler pm_vm_TCGEN05_MMA = {pm_vm_encode_missing, NULL, {0}};
const handler pm_vm_TCGEN05_COMMIT = {pm_vm_encode_missing, NULL, {0}};
const handler pm_vm_COPY_S2T = {pm_vm_encode_missing, NULL, {0}};
const handler pm_vm_COPY_SCALES = {pm_vm_encode_missing, NULL, {0}};
const handler pm_vm_COPY_METADATA = {pm_vm_encode_missing, NULL, {0}};
const handler pm_vm_LOAD_TMEM = {pm_vm_encode_missing, NULL, {0}};
const handler pm_vm_TMEM_REDUCED = {pm_vm_encode_missing, NULL, {0}};
const handler pm_vm_STORE_TMEM = {pm_vm_encode_missing, NULL, {0}};
const handler pm_vm_COMMIT_TMEM = {pm_vm_encode_missing, NULL, {0}};
const handler pm_vm_WAIT_LOAD_TMEM = {pm_vm_encode_missing, NULL, {0}};
