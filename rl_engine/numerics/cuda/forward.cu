// Partials of rows of bf16 logits: one block a row, or a split of one; one pass, 16 bytes a load.

DEVICE void forward_body(const uint4* row, int num_vectors, float scale_l, float inv_l, u32 first, u32* bins, Sums& s) {
  const int tid = threadIdx.x;
  const u32 first2 = first | (first << 16);
  const u32 last2 = first2 + (NUM_BINS - 1) * 0x00010001u;
  u32 address = (u32)__cvta_generic_to_shared(bins);
  u32 x_min2 = 0;
  int i = tid;
  for (; i + 3 * THREADS < num_vectors; i += 4 * THREADS) {
    uint4 v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = __ldcs(row + i + j * THREADS);
#pragma unroll
    for (int j = 0; j < COUNTED; ++j) count_vector(v[j], address, first2, last2);
    if (COUNTED < 4) {
      u32 top = top2(v[COUNTED]);
#pragma unroll
      for (int j = COUNTED + 1; j < 4; ++j) top = max_nan_bf16x2(top, top2(v[j]));
      rise_to(s, top_of(top), scale_l, inv_l);
      x_min2 = pack_x_min(s.at.x_min);
#pragma unroll
      for (int j = COUNTED; j < 4; ++j) add_digits(v[j], s, scale_l, x_min2);
    }
  }
  for (; i < num_vectors; i += THREADS) {
    uint4 v = __ldcs(row + i);
    if (COUNTED) {
      count_vector(v, address, first2, last2);
    } else {
      rise_to(s, top_of(top2(v)), scale_l, inv_l);
      add_digits(v, s, scale_l, pack_x_min(s.at.x_min));
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) forward_bf16(
    const u16* logits, const i64* target_local, i64* out, i64 row_stride, int num_rows, int real_cols,
    int split_cols, float scale_l, float inv_l, int first_bin) {
  extern __shared__ u32 bins[];
  __shared__ i64 warp_w[THREADS / 32][3];
  __shared__ BlockState block;
  const int tid = threadIdx.x;
  const i64 row = blockIdx.x;
  const int begin = blockIdx.y * split_cols, end = min(begin + split_cols, real_cols);
  const u16* base = logits + row * row_stride;
  const uint4* vectors = (const uint4*)(base + begin);
  const int num_vectors = (end - begin) / 8;
  if (tid == 0) reset(block);
  for (int i = tid; i < NUM_BINS; i += THREADS) bins[i] = 0;
  __syncthreads();
  Sums s = empty_sums();
  forward_body(vectors, num_vectors, scale_l, inv_l, (u32)first_bin, bins, s);
  const int rest = (end - begin) % 8;  // the padding beside them is not read as logits
  if (rest && tid == 0) {
    uint4 v = vectors[num_vectors];
    mask_tail(v, rest);
    rise_to(s, top_of(top2(v)), scale_l, inv_l);
    add_digits(v, s, scale_l, pack_x_min(s.at.x_min));
  }
  __syncthreads();
  int counts[BINS_PER_THREAD];
  publish(block, read_counts(bins, 0xffffffffu, counts), s);
  __syncthreads();
  const Exponent at = block_exponent(block, first_bin, scale_l, inv_l);
  i64 w[3];
  float g[BINS_PER_THREAD];
  bin_exponentials(g, at, first_bin, scale_l);
  total_words(s, counts, g, at, w);
#pragma unroll
  for (int k = 0; k < 3; ++k) {
    const i64 v = warp_sum(w[k]);
    if (tid % 32 == 0) warp_w[tid / 32][k] = v;
  }
  __syncthreads();
  i64* partial = out + ((i64)blockIdx.y * num_rows + row) * 6;
  if (tid < 3) {
    i64 v = 0;
    for (int i = 0; i < THREADS / 32; ++i) v += warp_w[i][tid];
    partial[1 + tid] = v;
  }
  if (tid == 0) {
    const i64 target = target_local[row];
    const bool owned = target >= begin && target < end;
    partial[0] = at.e;
    partial[4] = owned ? FLAG_OWNED : 0;
    partial[5] = owned ? (i64)((u32)base[target] << 16) : 0;
  }
  if (block.unusual) {
    __shared__ i64 scratch[THREADS / 32];
    const Partial p = careful_partial(base + begin, end - begin, scale_l, inv_l, scratch);
    if (tid == 0) partial[0] = p.e, partial[1] = p.w0, partial[2] = p.w1, partial[3] = p.w2, partial[4] += p.flags;
  }
}
