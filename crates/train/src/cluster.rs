//! Clusters of embeddings: texts that the model cannot tell apart are false negatives of each
//! other.
//!
//! k-means over the vectors that lead from the origin of the hyperboloid to the points. It begins
//! with points that are far from each other and goes through everything in one order, so that the
//! same points have the same clusters on every machine that computed them alike.

/// Rounds after which clusters hardly change.
const ROUNDS: usize = 50;

/// The vector from the origin to each point, given as time and space: as long as the way is, in
/// the direction of space.
pub(crate) fn tangents(points: &[f32], width: usize) -> Vec<f64> {
    let mut tangents = Vec::with_capacity(points.len());
    for point in points.chunks_exact(width.max(1)) {
        let Some((&time, space)) = point.split_first() else {
            continue;
        };
        let length = f64::from(time).max(1.0).acosh();
        let norm = space.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>();
        let scale = match norm > 0.0 {
            true => length / norm.sqrt(),
            false => 0.0,
        };
        tangents.extend(space.iter().map(|&x| f64::from(x) * scale));
    }
    tangents
}

fn distance(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum()
}

/// The cluster of each vector.
pub(crate) fn clusters(vectors: &[f64], width: usize, count: usize) -> Vec<u32> {
    let rows: Vec<&[f64]> = vectors.chunks_exact(width.max(1)).collect();
    let count = count.min(rows.len());
    if count < 2 {
        return vec![0; rows.len()];
    }
    let mut centres = first_centres(&rows, count);
    let mut found = vec![u32::MAX; rows.len()];
    for _ in 0..ROUNDS {
        let now: Vec<u32> = rows.iter().map(|row| nearest(row, &centres)).collect();
        if now == found {
            break;
        }
        found = now;
        let mut sums = vec![vec![0.0; width]; count];
        let mut sizes = vec![0_usize; count];
        for (row, &cluster) in rows.iter().zip(&found) {
            sizes[cluster as usize] += 1;
            for (sum, x) in sums[cluster as usize].iter_mut().zip(*row) {
                *sum += x;
            }
        }
        for ((centre, sum), size) in centres.iter_mut().zip(sums).zip(sizes) {
            // One that lost all of its vectors stays where it was.
            if size > 0 {
                *centre = sum.into_iter().map(|x| x / size as f64).collect();
            }
        }
    }
    found
}

/// The first vector, then always the one that is farthest from all chosen before.
fn first_centres(rows: &[&[f64]], count: usize) -> Vec<Vec<f64>> {
    let mut centres: Vec<Vec<f64>> = Vec::with_capacity(count);
    let mut far = vec![f64::INFINITY; rows.len()];
    let mut next = 0;
    while centres.len() < count {
        let centre = rows[next].to_vec();
        for (far, row) in far.iter_mut().zip(rows) {
            *far = far.min(distance(row, &centre));
        }
        centres.push(centre);
        let farthest = (0..far.len())
            .rev()
            .max_by(|&a, &b| far[a].total_cmp(&far[b]));
        next = farthest.unwrap_or(0);
    }
    centres
}

/// The first of the centres that are nearest.
fn nearest(row: &[f64], centres: &[Vec<f64>]) -> u32 {
    let far = centres.iter().map(|centre| distance(row, centre));
    let nearest = far.enumerate().min_by(|a, b| a.1.total_cmp(&b.1));
    nearest.map_or(0, |(cluster, _)| cluster as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_that_lie_apart_are_found() {
        let centres = [[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]];
        let vectors: Vec<f64> = (0..30)
            .flat_map(|row| {
                let [x, y] = centres[row % 3];
                let shift = (row / 3) as f64 * 0.1;
                [x + shift, y - shift]
            })
            .collect();
        let found = clusters(&vectors, 2, 3);
        for (row, cluster) in found.iter().enumerate() {
            assert_eq!(*cluster, found[row % 3]);
        }
        assert!(found[0] != found[1] && found[1] != found[2] && found[0] != found[2]);
        assert_eq!(clusters(&vectors, 2, 1), [0; 30]);
        assert_eq!(clusters(&[], 2, 4), [] as [u32; 0]);
    }

    /// x = sinh(r)·v for a unit vector v leads back to r·v.
    #[test]
    fn tangents_undo_the_map_to_the_hyperboloid() {
        let r = 1.3_f64;
        let point = [r.cosh(), r.sinh() * 0.6, r.sinh() * 0.8].map(|x| x as f32);
        let tangent = tangents(&point, 3);
        assert!((tangent[0] - r * 0.6).abs() < 1e-6 && (tangent[1] - r * 0.8).abs() < 1e-6);
        assert_eq!(tangents(&[1.0, 0.0, 0.0], 3), [0.0, 0.0]);
    }
}
