// Loss and gradient of a row in one visit: read once from memory, kept in the shared memory of a cluster of CLUSTER
// blocks, closed, and overwritten there by its gradient. Persistent: a cluster takes every gridDim/CLUSTER-th row,
// and the next row's pieces come in as soon as this row's gradient has left their place.
//
// A warp owns a contiguous segment of the block's slice, in pieces of 128 vectors with a barrier each; it waits for no
// other warp but to close the row.
//
// The histogram (words.cuh) keeps counts in the lower halves; once the row is closed, the upper halves take the bins'
// gradients, so that most logits find theirs by a look-up.

#define WARPS (THREADS / 32)
#define PIECE 128  // vectors of 8 logits
#define LANE_VECTORS (PIECE / 32)

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE void barrier_init(u32 bar) { asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(bar) : "memory"); }
DEVICE void barrier_wait(u32 bar, u32 parity) {
  asm volatile(
      "{\n .reg .pred done;\n again:\n"
      " mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n @!done bra again;\n}" ::"r"(bar),
      "r"(parity)
      : "memory");
}
DEVICE void load_piece(u32 to, const void* from, u32 bytes, u32 bar) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
      "r"(bytes), "r"(bar)
      : "memory");
}
DEVICE void store_piece(void* to, u32 from, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
DEVICE void cluster_sync() {
#if CLUSTER > 1
  asm volatile("barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}
DEVICE u32 cluster_rank() {
  u32 r;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
DEVICE void store_remote(i64* local, u32 rank, i64 value) {
  u32 remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(local)), "r"(rank));
  asm volatile("st.shared::cluster.b64 [%0], %1;" ::"r"(remote), "l"(value) : "memory");
}

struct Verdict {  // what the backward needs to know of a row
  float n, f, a;
  int fill;      // 0 compute, 1 zeros, 2 NaN
  int look_up;   // whether the bins hold gradients
  int target;    // column, -1 where there is none
};

// The slope of -p in a: section 4 with a coefficient of logp alone, away from the target.
DEVICE float probability(float x, float scale_l, const Verdict& v) {
  float y = __fsub_rn(__fmaf_rn(x, scale_l, -v.n), v.f);
  y = y < MIN_LOG2_PROB ? -127.0f : y;
  float t = __fadd_rn(y, MAGIC);
  return scale_by(exp2_poly(__fsub_rn(y, __fsub_rn(t, MAGIC))), __float_as_int(t));
}
DEVICE float slope_away(float x, float scale_l, const Verdict& v) {
  return __fmul_rn(v.a, __fsub_rn(0.0f, probability(x, scale_l, v)));
}
DEVICE u32 pack_bf16(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
DEVICE u32 slope_word(u32 w, float scale_l, const Verdict& v) {
  return pack_bf16(slope_away(low_bf16(w), scale_l, v), slope_away(high_bf16(w), scale_l, v));
}
DEVICE u32 look_up_word(u32 w, u32 bins, u32 first2, u32 last2) {
  u32 o = bin_offsets(w, first2, last2), lo, hi;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(lo) : "r"(bins + (o & 0xffffu)));
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(hi) : "r"(bins + (o >> 16)));
  return __byte_perm(lo, hi, 0x7632);
}
DEVICE uint4 slope_vector(const uint4 x, float scale_l, const Verdict& v) {
  return make_uint4(slope_word(x.x, scale_l, v), slope_word(x.y, scale_l, v), slope_word(x.z, scale_l, v),
                    slope_word(x.w, scale_l, v));
}
DEVICE uint4 look_up_vector(const uint4 x, u32 bins, u32 first2, u32 last2) {
  return make_uint4(look_up_word(x.x, bins, first2, last2), look_up_word(x.y, bins, first2, last2),
                    look_up_word(x.z, bins, first2, last2), look_up_word(x.w, bins, first2, last2));
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) __cluster_dims__(CLUSTER, 1, 1) fused_bf16(
    const u16* logits, u16* gradient, const i64* target_local, const float* old_logp, const float* advantage,
    const float* ref_logp, const unsigned char* active, const float* weight, double* lse2_out, float* logp_out,
    float* upstream_out, unsigned char* good_out, unsigned char* owned_out, i64 row_stride,
    i64 gradient_stride, int num_rows, int real_cols, int num_cols, int slice_vectors, float scale_l, float inv_l,
    int first_bin, Objective objective) {
  extern __shared__ __align__(128) unsigned char memory[];
  uint4* slice = (uint4*)memory;                                   // [slice_vectors]
  u32* bins = (u32*)(memory + (u64)slice_vectors * 16);            // [NUM_BINS]
  __shared__ __align__(8) u64 barriers[WARPS * PIECES];
  __shared__ i64 warp_w[WARPS][3];
  __shared__ i64 cluster_partials[2][CLUSTER][6];  // by parity of the row: a peer may be one row ahead
  __shared__ i64 scratch[WARPS];
  __shared__ BlockState block;
  __shared__ Verdict verdict;

  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  const int rank = CLUSTER > 1 ? cluster_rank() : 0;
  const int num_clusters = gridDim.x / CLUSTER;
  const int all_vectors = num_cols / 8, real_vectors = real_cols / 8;
  const int slice_begin = rank * slice_vectors;
  const int slice_count = max(0, min(slice_vectors, all_vectors - slice_begin));
  const int segment = (slice_vectors + WARPS * 32 - 1) / (WARPS * 32) * 32;
  const int begin = min(warp * segment, slice_count);              // of this warp, in the slice
  const int count = min(begin + segment, slice_count) - begin;
  const int pieces = (count + PIECE - 1) / PIECE;
  const int real_count = min(count, max(0, real_vectors - slice_begin - begin));  // what is not padding
  const u32 my_slice = shared_address(slice + begin), my_barriers = shared_address(barriers + warp * PIECES);
  const u32 bins_at = shared_address(bins);
  const u32 first2 = (u32)first_bin | ((u32)first_bin << 16), last2 = first2 + (NUM_BINS - 1) * 0x00010001u;

  for (int i = tid; i < NUM_BINS; i += THREADS) bins[i] = 0;
  if (lane == 0) {
    for (int j = 0; j < PIECES; ++j) barrier_init(my_barriers + 8 * j);
  }
  if (tid == 0) reset(block);
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  __syncthreads();
  i64 row = blockIdx.x / CLUSTER;
  const i64 offset = (i64)(slice_begin + begin) * 8;
  if (row < num_rows && lane == 0) {
    for (int j = 0; j < pieces; ++j)
      load_piece(my_slice + j * PIECE * 16, logits + row * row_stride + offset + j * PIECE * 8,
                 min(PIECE, count - j * PIECE) * 16, my_barriers + 8 * j);
  }
  cluster_sync();

  float g[BINS_PER_THREAD];  // exponentials of this thread's bins, for the reference exponent g_of
  int g_of = EMPTY_EXPONENT;
  for (u32 parity = 0; row < num_rows; row += num_clusters, parity ^= 1) {
    // what closing will need; asked for now so that it is there
    i64 target = 0;
    float old = 0, adv = 0, ref = 0, wt = 0;
    bool is_active = false;
    if (warp == 0) {
      target = target_local[row];
      is_active = active[row];
      old = old_logp[row], adv = advantage[row], wt = weight[row];
      if (objective.kl) ref = ref_logp[row];
    }

    // ---- forward
    Sums s = empty_sums();
    for (int j = 0; j < pieces; ++j) {
      barrier_wait(my_barriers + 8 * j, parity);
      const int left = real_count - j * PIECE;
      const uint4* piece = slice + begin + j * PIECE + lane;
      if (left >= PIECE) {
        uint4 v[LANE_VECTORS];
#pragma unroll
        for (int i = 0; i < LANE_VECTORS; ++i) v[i] = piece[i * 32];
#pragma unroll
        for (int i = 0; i < COUNTED; ++i) count_vector(v[i], bins_at, first2, last2);
        if (COUNTED < LANE_VECTORS) {
          u32 top = top2(v[COUNTED]);
#pragma unroll
          for (int i = COUNTED + 1; i < LANE_VECTORS; ++i) top = max_nan_bf16x2(top, top2(v[i]));
          rise_to(s, top_of(top), scale_l, inv_l);
          u32 x_min2 = pack_x_min(s.at.x_min);
#pragma unroll
          for (int i = COUNTED; i < LANE_VECTORS; ++i) add_digits(v[i], s, scale_l, x_min2);
        }
      } else {
#pragma unroll
        for (int i = 0; i < LANE_VECTORS; ++i) {
          if (i * 32 + lane < left) count_vector(piece[i * 32], bins_at, first2, last2);
        }
      }
    }
    __syncthreads();
    int counts[BINS_PER_THREAD];
    publish(block, read_counts(bins, 0xffffu, counts), s);
    __syncthreads();
    const bool unusual = block.unusual;
    const Exponent at = block_exponent(block, first_bin, scale_l, inv_l);
    {
      i64 w[3];
      if (at.e != g_of) {
        bin_exponentials(g, at, first_bin, scale_l);
        g_of = at.e;
      }
      total_words(s, counts, g, at, w);
#pragma unroll
      for (int k = 0; k < 3; ++k) {
        const i64 v = warp_sum(w[k]);
        if (lane == 0) warp_w[warp][k] = v;
      }
    }
    __syncthreads();
    Partial p;
    if (unusual) {
      const int real_slice = min(slice_count, max(0, real_vectors - slice_begin)) * 8;
      p = careful_partial((const u16*)slice, real_slice, scale_l, inv_l, scratch);
    } else if (warp == 0) {
      p = {at.e, 0, 0, 0, 0, 0};
      if (lane < WARPS) p.w0 = warp_w[lane][0], p.w1 = warp_w[lane][1], p.w2 = warp_w[lane][2];
      p.w0 = warp_sum(p.w0), p.w1 = warp_sum(p.w1), p.w2 = warp_sum(p.w2);
    }
    if (warp == 0) {
      i64 mine = target - (i64)slice_begin * 8;
      if (mine >= 0 && mine < (i64)slice_count * 8 && target < real_cols) {
        p.flags += FLAG_OWNED;
        p.target_bits = (i64)((u32)((const u16*)slice)[mine] << 16);
      }
      if (lane < CLUSTER) {
        i64* to = cluster_partials[parity][rank];
        const i64 values[6] = {p.e, p.w0, p.w1, p.w2, p.flags, p.target_bits};
#pragma unroll
        for (int k = 0; k < 6; ++k) {
          if (CLUSTER > 1)
            store_remote(to + k, lane, values[k]);
          else
            to[k] = values[k];
        }
      }
    }
    cluster_sync();

    // ---- close
    if (warp == 0) {
      Partial m = {EMPTY_EXPONENT, 0, 0, 0, 0, 0};
#pragma unroll
      for (int c = 0; c < CLUSTER; ++c) m.e = max(m.e, cluster_partials[parity][c][0]);
#pragma unroll
      for (int c = 0; c < CLUSTER; ++c) {
        const i64* q = cluster_partials[parity][c];
        i64 a = q[1], b = q[2], d = q[3];
        shift_words((int)(m.e - q[0]) / 22, a, b, d);
        m.w0 += a, m.w1 += b, m.w2 += d, m.flags += q[4], m.target_bits += q[5];
      }
      Closed closed = close_row(m, scale_l);
      float logp = is_active ? closed.logp : 0.0f;
      float slope = is_active ? token_gradient(logp, old, adv, ref, objective) : 0.0f;
      slope = slope != 0.0f ? __fmul_rn(slope, wt) : 0.0f;
      float a = is_active && slope != 0.0f ? __fmul_rn(slope, objective.inv_t) : 0.0f;
      if (!closed.owned && a != 0.0f) a = __int_as_float(0x7fffffff);
      double n = rint(closed.lse2);
      Verdict v;
      v.n = (float)n;
      v.f = (float)__dsub_rn(closed.lse2, n);
      v.a = a;
      float check = __fadd_rn((float)__dmul_rn(closed.lse2, 0.0), __fmul_rn(a, 0.0f));
      v.fill = a == 0.0f ? 1 : check == 0.0f ? 0 : 2;
      v.look_up = v.n != 0.0f;
      v.target = target >= 0 && target < real_cols ? (int)target : -1;
      if (lane == 0) {
        verdict = v;
        reset(block);
        if (rank == 0) {
          lse2_out[row] = closed.lse2;
          logp_out[row] = logp;
          upstream_out[row] = slope;
          good_out[row] = closed.good;
          owned_out[row] = closed.owned;
        }
      }
    }
    __syncthreads();
    const Verdict v = verdict;
    const bool table = v.look_up && !unusual && v.fill == 0;
#pragma unroll
    for (int k = 0; k < BINS_PER_THREAD; k += 3) {
      int any = 0;
#pragma unroll
      for (int i = k; i < k + 3 && i < BINS_PER_THREAD; ++i) any |= counts[i];
      if (!any) continue;
#pragma unroll
      for (int i = k; i < k + 3 && i < BINS_PER_THREAD; ++i) {
        const int bin = tid + i * THREADS;
        const u32 entry = table ? pack_bf16(0.0f, slope_away(bin_value(bin, first_bin), scale_l, v)) : 0;
        if (counts[i]) bins[bin] = entry;
      }
    }
    __syncthreads();

    // ---- backward
    const int t_mine = v.target - (slice_begin + begin) * 8;  // of this warp's segment
    const bool holds = v.fill == 0 && v.target >= 0 && t_mine >= 0 && t_mine < count * 8;
    u16* out = gradient + row * gradient_stride + offset;
    const i64 next = row + num_clusters;
    const u16* coming = logits + next * row_stride + offset;
    for (int j = 0; j < pieces; ++j) {
      const int left = real_count - j * PIECE, size = min(PIECE, count - j * PIECE);
      uint4* piece = slice + begin + j * PIECE + lane;
      const bool here = holds && t_mine / 8 / PIECE == j;
      float x_t = 0.0f;
      if (here) x_t = __uint_as_float((u32)((const u16*)(slice + begin))[t_mine] << 16);
      __syncwarp();
      if (table && left >= PIECE) {
#pragma unroll
        for (int i = 0; i < LANE_VECTORS; ++i) {
          uint4 x = piece[i * 32];
          piece[i * 32] = i < LOOKED_UP ? look_up_vector(x, bins_at, first2, last2) : slope_vector(x, scale_l, v);
        }
      } else {
        for (int i = 0; i < LANE_VECTORS; ++i) {
          if (i * 32 + lane < size) {
            uint4 x = piece[i * 32];
            if (i * 32 + lane >= left || v.fill == 1) {
              x = make_uint4(0, 0, 0, 0);
            } else if (v.fill == 2) {
              x = make_uint4(0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu);
            } else if (table) {
              x = look_up_vector(x, bins_at, first2, last2);
            } else {
              x = slope_vector(x, scale_l, v);
            }
            piece[i * 32] = x;
          }
        }
      }
      __syncwarp();
      if (here && lane == 0) {
        float d = __fmul_rn(v.a, __fsub_rn(1.0f, probability(x_t, scale_l, v)));
        ((u16*)(slice + begin))[t_mine] = (u16)(pack_bf16(d, d) & 0xffffu);
      }
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      __syncwarp();
      if (lane == 0) {
        store_piece(out + j * PIECE * 8, my_slice + j * PIECE * 16, size * 16);
        // the piece LAG before has left its place, or waits a moment
        if (next < num_rows && j >= LAG) {
          asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LAG) : "memory");
          load_piece(my_slice + (j - LAG) * PIECE * 16, coming + (j - LAG) * PIECE * 8, PIECE * 16,
                     my_barriers + 8 * (j - LAG));
        }
      }
    }
    if (next < num_rows && lane == 0 && pieces > 0) {
      asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
      for (int j = max(0, pieces - LAG); j < pieces; ++j)
        load_piece(my_slice + j * PIECE * 16, coming + j * PIECE * 8, min(PIECE, count - j * PIECE) * 16,
                   my_barriers + 8 * j);
    }
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  cluster_sync();
}
